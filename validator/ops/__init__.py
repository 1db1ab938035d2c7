"""What an operator needs to run a validator for long: problems in words, health, metrics, alerts."""
