"""What every Headrace service shares. Import the module that you need; this package exports nothing itself."""
