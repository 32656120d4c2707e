"""What is promised of the back end `ray`, shown with processes: `make test-ray`."""
