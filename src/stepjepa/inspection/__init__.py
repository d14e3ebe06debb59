"""What a record becomes, and whether training does what is meant."""
