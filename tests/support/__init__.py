"""Real servers for tests: started on free ports, in temporary folders, stopped with the tests."""
