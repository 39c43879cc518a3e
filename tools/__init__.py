"""What makes models, and is no part of the package: it runs from a checkout."""
