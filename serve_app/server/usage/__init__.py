"""Who used what: the ledger of all ingresses, and the routes that show it."""
