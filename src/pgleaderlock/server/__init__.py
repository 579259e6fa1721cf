"""The lock server: leases with fencing tokens over HTTP. Needs the extra `server`."""
