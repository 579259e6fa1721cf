"""What the lock server and the dashboard share: who may ask, how much, and how it is served and described."""
