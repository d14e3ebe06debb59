"""The terms of the loss, the objective that weighs them, ``Jepa``, and the reading of embeddings."""
