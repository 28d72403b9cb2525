"""The paper's experiments: data, target models, recipes, reports. Short programs over the public API."""
