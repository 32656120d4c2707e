#!/bin/sh
# Publishes one trajectory: produce.sh SESSION [HOST:PORT]. Needs kcat, jq and openssl.
set -eu
session=${1:?usage: produce.sh SESSION [HOST:PORT]}
bus=${2:-127.0.0.1:9092}

# The Kafka key of everything about a session: the first 80 bits of SHA-256, as lower-case base32.
key=$(printf 'default\0%s' "$session" | openssl dgst -sha256 -binary | head -c 10 | base32 | tr 'A-Z' 'a-z')

# The embedded broker's password is in .headrace/run/token. kcat reads it from a file, which `ps` does not show.
login=$(mktemp)
trap 'rm -f "$login"' EXIT
if [ -n "${HEADRACE_BUS__PASSWORD:-}" ]; then
  printf 'security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\nsasl.username=%s\nsasl.password=%s\n' \
    "${HEADRACE_BUS__USERNAME:-headrace}" "$HEADRACE_BUS__PASSWORD" > "$login"
fi

# librdkafka's own partitioner is another one than Kafka's: events of a session have to meet on one partition.
jq -c --arg session "$session" --arg key "$key" --arg now "$(date -u +%Y-%m-%dT%H:%M:%SZ)" '
  .session_id = $session | .trajectory_id = $session | .session_key = $key |
  .time = $now | .started_at = $now | .branches[0].spans[0].turn_id = $session + "-1"
' "$(dirname "$0")/../trajectory.json" |
  kcat -F "$login" -b "$bus" -P -t trajectories -k "$key" -X acks=all -X partitioner=murmur2_random
echo "$session is on trajectories"
