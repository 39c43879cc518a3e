"""The things that processes of one machine share: locks, and turns on its cores."""
