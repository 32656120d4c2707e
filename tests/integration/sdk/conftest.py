"""Buses whose topics are nobody else's."""

from tests.support.own_bus import own_bus as own_bus
from tests.support.own_bus import own_kafka as own_kafka
