"""A job that knows nothing of leadership, and ends. See kubernetes/cronjob.yaml."""

import os
import time

for page in range(1, int(os.environ.get("REPORT_PAGES", "3")) + 1):
    print("page", page)
    time.sleep(0.1)  # your work
print("the report is done")
