"""Caption the images of a prepared dataset with a vision-language model, into tables beside its shards."""
