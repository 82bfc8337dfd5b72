{{- define "clusterprof.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "clusterprof.labels" -}}
app.kubernetes.io/name: clusterprof
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "clusterprof.selector" -}}
app.kubernetes.io/name: clusterprof
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "clusterprof.claim" -}}
{{ .Values.recordings.claim | default (printf "%s-recordings" (include "clusterprof.name" .)) }}
{{- end }}

{{/* What every pod may do: nothing but to run as a user without rights. */}}
{{- define "clusterprof.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.runAsUser }}
  runAsGroup: {{ .Values.recordings.group }}
  fsGroup: {{ .Values.recordings.group }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "clusterprof.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
