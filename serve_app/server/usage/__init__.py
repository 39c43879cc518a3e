"""Usage by clients: the ledger of all ingresses, and the routes that show it."""
