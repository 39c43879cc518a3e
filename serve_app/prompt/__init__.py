"""Chat templates, tokenization and grammars, and what models' answers are split into."""
