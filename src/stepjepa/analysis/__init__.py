"""What a trained model makes of the views of records: numbers, projections, pictures."""
