"""The `corral` command. What a command needs is imported when it runs, so that `corral --help` is quick."""
