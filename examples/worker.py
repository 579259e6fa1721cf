"""A worker that knows nothing of leadership: `pgleaderlock exec` starts it and stops it. See systemd/."""

import os
import signal
import sys
import time

# A clean end on request is no failure: exec passes this exit code on.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

print("sending invoices, as leader of", os.environ.get("PGLEADERLOCK_NAME", "nothing"))
while True:
    time.sleep(1)  # your work: here it never ends. (Python may notice a signal only when a sleep is over.)
