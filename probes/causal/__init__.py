"""What matters: a part of attention is changed, and the change of the model's output is measured."""
