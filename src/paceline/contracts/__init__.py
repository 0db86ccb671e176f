"""What a recipe is, for every other package."""
