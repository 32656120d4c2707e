"""Simulation of all stream services in one process, on a virtual clock, under faults.

`simulate(seed)` (`program.py`) plays one `Cluster` (`cluster.py`). Agents work through two gateways; collectors,
scorers, the trainer, the registry and replicas work as in production. The seed decides which faults happen: deaths
(before and after a commit, and during a save), rebalances, duplicates, delays, a slow trainer, an unreachable bus or
blob store, commits that fail or whose answer is lost, and records that are no events. Then the faults stop. Every
service has to come to rest (`cluster.py`), and every promise is checked (`promises/`).

The services' code is the real one, from their `app.run` down. `substitutes.py` lists the replaced names: the event
loop's clock and threads (`process.py`), Kafka's clients (`bus.py`, `clients.py` and `faust_app.py`, held by
`tests/contract/used` to the behaviour of the embedded broker and Apache Kafka), the database's disk and connections
(`bus.py`), the disk under the blob store, HTTP, random numbers, and the arithmetic of training (`services.py`:
weights that list their lessons). Gateways are their publisher and spool without HTTP (`services.py`); reward functions
run in the scorer's process; there is no judge and no inference.

One seed is one run, byte for byte. A failure prints its seed and the command that repeats it.
"""
