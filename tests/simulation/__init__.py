"""The simulation: all stream services at once, in one process, on a clock that jumps, while everything goes wrong.

`simulate(seed)` (`run.py`) plays one `Cluster` (`cluster.py`): agents work through two gateways, collectors, scorers, the
trainer, the registry and replicas do what they do in production, and a plan of faults drawn from the seed happens to
them: deaths (also before and after a commit, and in the middle of a save), rebalances, duplicates, delays, a slow
trainer, a bus or a blob store that is away, commits that fail or of which nobody hears, records that are no events.
Then nothing goes wrong any more: all has to come to rest (`rest.py`), and every promise is checked (`promises/`).

The services' code is the real one, from their `app.run` down. What is replaced is listed in `substitutes.py`: the event
loop's clock and threads (`loop.py`), Kafka's clients (`kafka.py`: `bus.py`, `clients.py` and `faust_app.py`, held by
`tests/contract/used` to what the embedded broker and Apache Kafka promise), the database's disk and
connections (`database.py`), the disk under the blob store, HTTP, random numbers, and the arithmetic of training
(`learner.py`: weights that remember what they were trained on). Gateways are their publisher and spool without HTTP
(`services.py`); reward functions run in the scorer's process; there is no judge and no inference.

One seed is one run, byte for byte. A failure prints its seed and the command that plays it again.
"""
