"""Parts that several benchmarks share: prompts, servers, rounds, tables and plots."""
