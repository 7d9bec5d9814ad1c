"""Recipes, registries and the sample crawl: data that comes with Gristmill."""
