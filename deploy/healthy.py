"""Health check of a container: `healthy.py PORT` says what `/health` says and exits with 0 when that is 200.

Runs every few seconds beside the service, so it imports little and, with `python3 -I`, finds nothing else to import.
"""

import http.client
import sys

connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=2)
try:
    connection.request("GET", "/health")
    answer = connection.getresponse()
    sys.stdout.write(answer.read(1000).decode("utf-8", "replace") + "\n")
    sys.exit(0 if answer.status == 200 else 1)
except OSError as error:
    sys.exit(f"no answer on port {sys.argv[1]}: {error}")
