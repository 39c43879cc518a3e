"""Constraints of what may be generated: grammars, patterns, and texts that a grammar begins with."""
