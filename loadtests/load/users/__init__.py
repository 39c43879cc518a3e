"""The users of Locust: how they send and read, and how many they are."""
