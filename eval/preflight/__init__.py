"""What engines would make of a published folder, told without any of them."""
