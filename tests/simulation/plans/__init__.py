"""What a connection does in a scenario, from its number alone: both its ends know it."""
