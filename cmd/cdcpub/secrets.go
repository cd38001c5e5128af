package main

// brokerURLs are the brokers' complete URLs.
func (c Config) brokerURLs() ([]string, error) { return c.Publish.URLs, nil }
