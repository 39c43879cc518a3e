"""The page in the browser, and the live view that it shows."""
