package outbox

import "fmt"

// Object identifiers of built-in types (PostgreSQL src/include/catalog/pg_type.dat).
// They never change between releases.
const (
	oidBool        = 16
	oidBytea       = 17
	oidInt8        = 20
	oidInt2        = 21
	oidInt4        = 23
	oidText        = 25
	oidJSON        = 114
	oidXML         = 142
	oidFloat4      = 700
	oidFloat8      = 701
	oidBPChar      = 1042
	oidVarchar     = 1043
	oidDate        = 1082
	oidTime        = 1083
	oidTimestamp   = 1114
	oidTimestampTZ = 1184
	oidNumeric     = 1700
	oidUUID        = 2950
	oidJSONB       = 3802

	// firstUserOID is where the server begins to number what users create
	// (FirstNormalObjectId in access/transam.h).
	firstUserOID = 16384
)

func anyType(uint32) bool { return true }

func isInteger(oid uint32) bool { return oid == oidInt2 || oid == oidInt4 || oid == oidInt8 }

func isText(oid uint32) bool { return oid == oidText || oid == oidVarchar }

func isIntegerOrText(oid uint32) bool { return isInteger(oid) || isText(oid) }

// isTextOrEnum lets every user-defined type pass: the replication stream does
// not say which of them are enums. A value that is no kind is found row by row.
func isTextOrEnum(oid uint32) bool { return isText(oid) || oid >= firstUserOID }

func isTimestamp(oid uint32) bool { return oid == oidTimestampTZ || oid == oidTimestamp }

func isJSONOrText(oid uint32) bool { return oid == oidJSON || oid == oidJSONB || isText(oid) }

func isPayload(oid uint32) bool { return contentType(oid) != "" }

// contentType is the media type of a payload column, or empty for a type whose
// text form no consumer should have to read.
func contentType(oid uint32) string {
	switch oid {
	case oidJSON, oidJSONB:
		return "application/json"
	case oidBytea:
		return "application/octet-stream"
	case oidText, oidVarchar:
		return "text/plain"
	case oidXML:
		return "application/xml"
	default:
		return ""
	}
}

// typeName names the types that people use in outbox tables, for errors only.
func typeName(oid uint32) string {
	switch oid {
	case oidBool:
		return "boolean"
	case oidBytea:
		return "bytea"
	case oidInt8:
		return "bigint"
	case oidInt2:
		return "smallint"
	case oidInt4:
		return "integer"
	case oidText:
		return "text"
	case oidJSON:
		return "json"
	case oidXML:
		return "xml"
	case oidFloat4:
		return "real"
	case oidFloat8:
		return "double precision"
	case oidBPChar:
		return "char"
	case oidVarchar:
		return "varchar"
	case oidDate:
		return "date"
	case oidTime:
		return "time"
	case oidTimestamp:
		return "timestamp"
	case oidTimestampTZ:
		return "timestamptz"
	case oidNumeric:
		return "numeric"
	case oidUUID:
		return "uuid"
	case oidJSONB:
		return "jsonb"
	default:
		return fmt.Sprintf("OID %d", oid)
	}
}
