"""From tasks to batches of finished groups: what is started when, what is tried again, what is dropped."""
