"""The data sets that the toolkit knows: how their records are made, prompted and scored."""
