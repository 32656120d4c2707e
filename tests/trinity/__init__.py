"""What is promised of the back end `trinity`: `make test-trinity` reads our rows with Trinity's own reader."""
