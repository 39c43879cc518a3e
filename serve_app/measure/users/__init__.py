"""The users of a load: what they ask, how many they are, how they read."""
