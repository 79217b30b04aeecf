"""What examples/train_gpt.py is made of: model, data, and how the model is spread over ranks."""
