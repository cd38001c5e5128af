package service

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"
)

// openOrders is how many orders Traffic has open at once: few, so that each has
// several events soon.
const openOrders = 3

// Traffic places orders and changes them, one step each time that every has
// passed, until ctx ends; a step that has begun is finished. It calls report after
// each with the event and why it was rolled back, if it was: every seventh step
// is, on purpose. It returns an error only if the database fails.
func (s *Service) Traffic(ctx context.Context, every time.Duration, report func(Event, error)) error {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	var open []int64
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			if ctx.Err() != nil {
				return nil
			}
		}
		e, err := s.step(context.WithoutCancel(ctx), n, open)
		if err != nil && !errors.Is(err, ErrOverLimit) && !errors.Is(err, ErrBusy) {
			return err
		}
		report(e, err)
		switch {
		case err != nil: // nothing has changed
		case e.Version == 1:
			open = append(open, e.OrderID)
		case e.Type == "OrderPaid":
			open = slices.DeleteFunc(open, func(id int64) bool { return id == e.OrderID })
		}
	}
}

func (s *Service) step(ctx context.Context, n int, open []int64) (Event, error) {
	price := 100 + rand.Int64N(900)
	if len(open) < openOrders {
		return s.Place(ctx, price)
	}
	id := open[rand.IntN(len(open))]
	switch {
	case n%7 == 0:
		return s.AddItem(ctx, id, Limit)
	case rand.IntN(4) == 0:
		return s.Pay(ctx, id)
	default:
		return s.AddItem(ctx, id, price)
	}
}
