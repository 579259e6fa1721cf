"""The lock server's client, for asyncio and for threads. Needs the extra `client`."""
