"""Models made up on the spot, to try Corral without downloading one."""
