"""Buses whose topics belong to one test."""

from tests.support.own_bus import own_bus as own_bus
from tests.support.own_bus import own_kafka as own_kafka
