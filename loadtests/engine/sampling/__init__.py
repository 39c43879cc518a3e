"""The time that picking tokens takes beside decoding: `python -m loadtests.engine.sampling`."""
