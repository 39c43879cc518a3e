"""Models that OpenVINO's exporter wrote: a graph, its weights, a tokenizer.json and configurations."""
