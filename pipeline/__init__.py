"""From bytes to alerts: the window and judge stages, and what drives them."""
