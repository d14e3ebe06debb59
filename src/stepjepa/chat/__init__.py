"""Messages to text: chat templates, the form without a chat, predictor tokens."""
