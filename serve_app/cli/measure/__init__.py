"""Measurements of `corral bench`, `corral tune` and `corral capacity`, on this machine or over HTTP."""
