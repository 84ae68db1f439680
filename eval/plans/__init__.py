"""Plans by target: as small as a stated loss allows, or as good as a stated size allows."""
