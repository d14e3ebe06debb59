"""Tasks: how the records of each data set are made, prompted and scored."""
