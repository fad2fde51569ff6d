"""`TorchEngine`: the embedded engine, continuous batching over a Hugging Face model with its own KV cache."""
