"""Pictures and sounds in requests: fetched, decoded, and placed in prompts."""
