"""Which of the machine's resources this process may use."""
