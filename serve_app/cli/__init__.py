"""The `corral` command. A command imports its modules when it runs, so that `corral --help` is quick."""
