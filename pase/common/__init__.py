"""What every package stands on: documents and arrays read with care, frozen values, quantities in words."""
